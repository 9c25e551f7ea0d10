"""Reports about a converted checkpoint, how close to softmax and how fast it is: as data and as one HTML page."""
