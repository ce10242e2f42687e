"""In: a program of stages, loops and branches. Out: what each worker runs next, without the driver.

Canary's control plane (SoCC'18): docs/recipes.md. Pure; actors use it too.
"""
