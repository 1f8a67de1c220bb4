"""All parts of the table: importing this fills it."""

from __future__ import annotations

from cases import (
    part_a,
    part_b,
    part_c,
    part_d,
    part_e,
    part_f,
    part_g,
    part_h,
    part_k,
    part_p,
    part_q,
    part_r,
    part_s,
    part_t,
    part_u,
    part_v,
    part_w,
    part_x,
    part_y,
    part_z,
)

PARTS = (
    part_a,
    part_b,
    part_c,
    part_d,
    part_e,
    part_f,
    part_g,
    part_h,
    part_k,
    part_p,
    part_q,
    part_r,
    part_s,
    part_t,
    part_u,
    part_v,
    part_w,
    part_x,
    part_y,
    part_z,
)
