"""One file per idea; `fednorms.method` imports them all. Parts use only `part`, `tree`, `views` and `layers`."""
