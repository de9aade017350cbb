"""Problems made by rules: stories, sudoku and table questions."""
