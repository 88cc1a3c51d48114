"""What could be done at a point of the data flow: sites, the layers that fit there, and where exactly each one goes.

`trace` runs the example and says what is there; a site is offered only after a trial on a copy. `cutting` and `lists` are the code that
puts a layer into a module and takes it out again; for the user's model they are called by `surgery` alone (and by a measurement, which
takes out what it put in).
"""
