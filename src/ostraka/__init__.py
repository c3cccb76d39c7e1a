from ostraka._write import save
