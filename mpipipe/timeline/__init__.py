"""What became of a run's marks: the file (``chrome``), the numbers (``analysis``, ``report``) and the picture."""
