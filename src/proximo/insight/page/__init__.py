"""`proximo view`: a local web page that reads run folders, writes nothing, and follows runs in progress."""
