from random_target import bundled, checkpoints, table_file

__all__ = ["bundled", "checkpoints", "table_file"]
