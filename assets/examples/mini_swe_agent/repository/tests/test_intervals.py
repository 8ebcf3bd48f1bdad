import unittest

from intervals import length, overlap


class Intervals(unittest.TestCase):
    def test_length(self):
        self.assertEqual([length(3, 3), length(3, 5), length(5, 4)], [1, 3, 0])

    def test_overlap(self):
        self.assertTrue(overlap((1, 3), (3, 5)))
