"""The claim, measured: five libraries train one model beside slow and failing learners, over thin links."""
