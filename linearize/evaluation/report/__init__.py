"""Reports: what a converted checkpoint is and how close and how fast it is, as data and as one page to look at."""
