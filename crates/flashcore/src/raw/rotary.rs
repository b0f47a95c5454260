//! Rotary embedding of rows in host memory, and the checks of tensors of an append.

use half::{bf16, f16};
use problem::{Element, ElementType, Problem, ProblemError};

use super::{Tensor, View};
use crate::AttentionError;
use crate::cache::rotate;
use crate::error::refused;

/// Rotary position embedding. New key `i` is rotated by row `position + i` of the tables, where `position` is
/// the cache's length before the append. Query `i` is rotated by row `position + i` if the band hides keys,
/// and else all queries by row `position`, as in FlashAttention. Q is not changed in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rotary {
    /// Cosines, `[position, rotary_dim / 2]`, with any row stride. Other dims of a row are not rotated.
    pub cos: Tensor,
    /// Sines, of the cosines' type and shape.
    pub sin: Tensor,
    /// Whether dims `2 i` and `2 i + 1` form a pair. Else `i` and `i + rotary_dim / 2` do.
    pub interleaved: bool,
    /// `rotary_seqlens`, `[batch]`: the positions, in place of the cache's lengths.
    pub positions: Option<Tensor>,
}

pub(super) fn check_shape(
    argument: &'static str,
    view: &View,
    expected: &[usize],
) -> Result<(), AttentionError> {
    if view.shape() == expected {
        return Ok(());
    }
    Err(refused(argument, "shape", format!("{:?}", view.shape()), format!("{expected:?}")))
}

pub(super) fn check_rows(
    argument: &'static str,
    tensor: &Tensor,
    dtype: ElementType,
) -> Result<(), AttentionError> {
    let Tensor { address, view } = tensor;
    if view.dtype != dtype {
        let (dtype, expected) = (view.dtype.name(), dtype.name());
        return Err(ProblemError::OperandType { argument, dtype, expected }.into());
    }
    let stride = view.strides().last().copied().unwrap_or(1);
    if stride != 1 && view.shape().last() > Some(&1) && view.elements() > 0 {
        return Err(AttentionError::Strided { tensor: argument, stride });
    }
    let (accepted, address) = (dtype.bytes() as u64, *address);
    if view.elements() > 0 && (address == 0 || !address.is_multiple_of(accepted)) {
        return Err(AttentionError::HostAddress { tensor: argument, address, accepted });
    }
    Ok(())
}

pub(super) fn check_integers(
    argument: &'static str,
    tensor: &Tensor,
    expected: usize,
) -> Result<(), AttentionError> {
    check_rows(argument, tensor, ElementType::I32)?;
    check_shape(argument, &tensor.view, &[expected])
}

impl Rotary {
    pub(super) fn check(&self, problem: &Problem) -> Result<(), AttentionError> {
        let view = self.cos.view;
        let &[positions, half] = view.shape() else {
            let value = view.dimensions.to_string();
            let expected = "2: position, rotary_dim / 2".to_owned();
            return Err(refused("rotary_cos", "number of dimensions", value, expected));
        };
        if half == 0 || 2 * half > problem.head_dim {
            let expected = format!("1 to {}, half of head_dim", problem.head_dim / 2);
            return Err(refused("rotary_cos", "number of columns", half.to_string(), expected));
        }
        if !matches!(view.dtype, ElementType::F16 | ElementType::Bf16 | ElementType::F32) {
            let expected = "f16, bf16 or f32".to_owned();
            return Err(refused("rotary_cos", "element type", view.dtype.to_string(), expected));
        }
        for (argument, table) in [("rotary_cos", &self.cos), ("rotary_sin", &self.sin)] {
            check_rows(argument, table, view.dtype)?;
            check_shape(argument, &table.view, &[positions, half])?;
        }
        let offsets = self.positions.as_ref();
        offsets.map_or(Ok(()), |offsets| check_integers("rotary_seqlens", offsets, problem.batch))
    }
}

impl Rotary {
    /// The cosines and then the sines of a position, in f32.
    ///
    /// # Safety
    /// The tables have the position.
    pub(super) unsafe fn angles(&self, position: usize, to: &mut Vec<f32>) {
        to.clear();
        for table in [&self.cos, &self.sin] {
            // SAFETY: the caller's contract; a table of two dimensions has its rows in the first.
            unsafe {
                match table.view.dtype {
                    ElementType::F16 => to.extend(row_of::<f16>(table, position).iter().map(|x| x.to_f32())),
                    ElementType::Bf16 => {
                        to.extend(row_of::<bf16>(table, position).iter().map(|x| x.to_f32()))
                    }
                    _ => to.extend(row_of::<f32>(table, position)),
                }
            }
        }
    }

    pub(super) fn rotate<T: Element>(&self, row: &mut [T], angles: &[f32]) {
        let (cos, sin) = angles.split_at(angles.len() / 2);
        rotate(row, cos, sin, self.interleaved);
    }
}

pub(super) fn address<T>(tensor: &Tensor) -> *mut T {
    std::ptr::with_exposed_provenance_mut(tensor.address as usize)
}

/// Row `row` of a table of two dimensions.
///
/// # Safety
/// The table lies there, and nothing writes it during `'a`.
unsafe fn row_of<'a, T>(table: &Tensor, row: usize) -> &'a [T] {
    let offset = row as isize * table.view.strides[0] as isize;
    // SAFETY: the caller's contract.
    unsafe { std::slice::from_raw_parts(address::<T>(table).offset(offset), table.view.shape[1]) }
}

/// The address of a row `[batch, head, row]` of a tensor with four dimensions.
///
/// # Safety
/// The tensor has the row.
pub(super) unsafe fn place<T>(tensor: &Tensor, at: [usize; 3]) -> *mut T {
    let offset: isize = at.iter().zip(&tensor.view.strides).map(|(&i, &by)| i as isize * by as isize).sum();
    // SAFETY: the caller's contract.
    unsafe { address::<T>(tensor).offset(offset) }
}
