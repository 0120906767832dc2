"""Adapters over Transformers models: sparse layers, routers, masks, caches."""
