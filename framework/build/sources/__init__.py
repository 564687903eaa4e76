"""Where rows come from: files, folders, the hub, Python, and their columns."""
