"""Plans made in processes of their own: plan, fit, measure, calibrate, diff."""
