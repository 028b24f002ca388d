"""What all layouts of other projects share: how they are found, described and refused."""
