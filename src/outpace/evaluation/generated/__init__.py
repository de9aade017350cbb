"""Generated problems: stories, Sudoku sheets and tables."""
