"""The formats of tables with a column of images and a column of labels: Parquet and Arrow.

Images are image files or raw bytes, bare or in Hugging Face's struct; lists of numbers, flat or nested; or the struct of
Spark's image source. Labels are whole numbers, or names of classes."""
