"""Computing what experiments and comparisons lack: in this process, in several, or as Ray tasks."""
