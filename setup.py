from setuptools import setup

setup(cffi_modules=["clamor_ray/_native/builder.py:ffibuilder"])  # setup.cfg cannot carry this one
