"""The claim, measured: five libraries train the same model beside slow and failing learners and thin links."""
