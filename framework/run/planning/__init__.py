"""Plans made in child processes: plan, fit, measure, calibrate, what-if."""
