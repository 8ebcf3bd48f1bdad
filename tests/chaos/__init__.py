"""Things going wrong on purpose: processes killed, stopped and cut off, and what must hold all the same."""
