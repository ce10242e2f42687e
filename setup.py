from setuptools import Extension, setup

setup(
    cffi_modules=["clamor_ray/_native/builder.py:ffibuilder"],  # setup.cfg cannot carry these
    ext_modules=[
        Extension(
            "clamor_ray._array_type",
            ["pagecache_c/python/array_type.c"],
            extra_compile_args=["-std=c11", "-O2", "-g", "-fvisibility=hidden", "-Wall", "-Wextra"],
            py_limited_api=True,
        )
    ],
)
