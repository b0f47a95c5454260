//! Merging results over different keys, in host memory.
#![allow(unsafe_code, reason = "slices over the memory of the caller's tensors")]

use cpu::Element;
use half::{bf16, f16};
use problem::DType;
use pyo3::prelude::*;

use crate::error::Error;
use crate::host::aligned;

/// Merges dense results ([`flashcore::merge_states`]); `shape` is the number of rows and that of elements of
/// a row. `parts` has the addresses of rows and of one LSE for each row, and `to` those of the results.
#[pyfunction]
pub fn merge_states(
    py: Python<'_>,
    parts: Vec<(usize, usize)>,
    to: (usize, usize),
    shape: (usize, usize),
    dtype: &str,
) -> Result<(), Error> {
    match dtype.parse()? {
        DType::F16 => merged::<f16>(py, &parts, to, shape),
        DType::Bf16 => merged::<bf16>(py, &parts, to, shape),
        DType::F32 => merged::<f32>(py, &parts, to, shape),
        other => Err(Error::DType(format!("invalid value '{other}' for dtype: expected f16, bf16 or f32"))),
    }
}

fn merged<T: Element>(
    py: Python<'_>,
    parts: &[(usize, usize)],
    (out, lse): (usize, usize),
    (rows, dim): (usize, usize),
) -> Result<(), Error> {
    if rows == 0 || dim == 0 {
        return Ok(());
    }
    let mut slices = Vec::with_capacity(parts.len());
    for &(values, lse) in parts {
        let (values, lse) = (aligned::<T>("a part", values)?, aligned::<f32>("a part's lse", lse)?);
        // SAFETY: the package describes dense tensors of these shapes, which it keeps alive during the call.
        slices.push(unsafe {
            let values = std::slice::from_raw_parts(values.as_ptr().cast_const(), rows * dim);
            (values, std::slice::from_raw_parts(lse.as_ptr().cast_const(), rows))
        });
    }
    let (out, lse) = (aligned::<T>("out", out)?, aligned::<f32>("lse", lse)?);
    // SAFETY: the package has just allocated the results, so nothing else refers to them.
    let (out, lse) = unsafe {
        (
            std::slice::from_raw_parts_mut(out.as_ptr(), rows * dim),
            std::slice::from_raw_parts_mut(lse.as_ptr(), rows),
        )
    };
    Ok(py.detach(|| flashcore::merge_states(&slices, dim, out, lse))?)
}
