"""`infinity probe`: `command` reads the options, `work` measures, `choice` recommends, `shown` and `plot` show it."""
