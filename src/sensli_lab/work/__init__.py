"""The harness of experiments and comparisons: their command lines, computing what is missing (in this process, in several, or as Ray
tasks), results on disk, statistics, pages and figures."""
