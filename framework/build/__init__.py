"""Room 3: params become objects, one noun a file."""
