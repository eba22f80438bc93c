"""A draft's decoder layer around its attention, and the RMS norm."""
