"""What compression of visual tokens is measured by: questions with one right answer, their answers, and the time of every stage."""
