"""Paged-attention implementations. They take arrays only and know no configuration of the layers above."""
