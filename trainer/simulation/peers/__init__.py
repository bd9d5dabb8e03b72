"""Virtual time of exchanges in which workers keep models of their own."""
