"""How a plan, a comparison and, later, a run look: as text for a terminal and as a page. Numbers come from below."""
