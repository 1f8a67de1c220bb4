from flashinfer import absent

mm_M1_16_K7168_N256 = absent  # noqa: N816 (flashinfer's name)
