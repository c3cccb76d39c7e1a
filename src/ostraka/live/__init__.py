"""Live trees and arrays as data."""
