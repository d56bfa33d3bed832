"""`proximo view`: a page on this machine that reads run folders, writes nothing, and follows runs that are going on."""
