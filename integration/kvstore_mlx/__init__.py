"""kvstore_mlx: the kvstore adapter for mlx-lm.

``kvstore serve`` is mlx_lm.server with a cache directory below its in-memory prompt cache. Importing this package
imports neither mlx nor mlx-lm; the modules below do.
"""
