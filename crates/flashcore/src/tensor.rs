//! Strided views of slices.

use std::fmt;

use problem::{Layout, Strides};

use crate::AttentionError;

/// A read-only tensor `[batch, heads, sequence, dim]` in a slice. The last dimension is contiguous. The slice
/// starts at the lowest element in memory, so with a negative stride index 0 lies towards the end of the
/// slice.
#[derive(Clone, Copy)]
pub struct TensorView<'a, T> {
    pub(crate) data: &'a [T],
    pub(crate) shape: [usize; 4],
    pub(crate) strides: Strides,
}

/// A writable tensor `[batch, heads, sequence, dim]` in a slice, laid out as a [`TensorView`].
pub struct TensorViewMut<'a, T> {
    pub(crate) data: &'a mut [T],
    pub(crate) shape: [usize; 4],
    pub(crate) strides: Strides,
}

impl<'a, T> TensorView<'a, T> {
    /// A dense tensor of `shape = [batch, heads, sequence, dim]` in `layout`. `shape` has the same order for
    /// every layout.
    ///
    /// # Errors
    /// When the slice is too short or the view is too large to address.
    pub fn dense(data: &'a [T], shape: [usize; 4], layout: Layout) -> Result<Self, AttentionError> {
        TensorView::strided(data, shape, layout.strides(shape[1], shape[2], shape[3]))
    }

    /// A tensor of `shape = [batch, heads, sequence, dim]` with strides in elements. A stride of 0
    /// broadcasts.
    ///
    /// # Errors
    /// When the slice is too short or the view is too large to address.
    pub fn strided(data: &'a [T], shape: [usize; 4], strides: Strides) -> Result<Self, AttentionError> {
        check(data.len(), shape, strides)?;
        Ok(TensorView { data, shape, strides })
    }

    /// The elements of a row.
    pub(crate) fn row(&self, batch: usize, head: usize, row: usize) -> &'a [T] {
        let Strides { batch: of_batch, head: of_head, row: of_row } = self.strides;
        let [batches, heads, rows, dim] = self.shape;
        // With a negative stride, the last index has the lowest element, from which the slice begins.
        let step = |index: usize, extent: usize, stride: i64| match stride {
            0.. => index * stride.unsigned_abs() as usize,
            _ => (extent - 1 - index) * stride.unsigned_abs() as usize,
        };
        let start = step(batch, batches, of_batch) + step(head, heads, of_head) + step(row, rows, of_row);
        &self.data[start..start + dim]
    }
}

impl<'a, T> TensorViewMut<'a, T> {
    /// A dense tensor of `shape = [batch, heads, sequence, dim]` in `layout`. `shape` has the same order for
    /// every layout.
    ///
    /// # Errors
    /// When the slice is too short or the view is too large to address.
    pub fn dense(data: &'a mut [T], shape: [usize; 4], layout: Layout) -> Result<Self, AttentionError> {
        TensorViewMut::strided(data, shape, layout.strides(shape[1], shape[2], shape[3]))
    }

    /// A tensor of `shape = [batch, heads, sequence, dim]` with strides in elements. Rows must not overlap;
    /// the computation rejects overlapping rows.
    ///
    /// # Errors
    /// When the slice is too short or the view is too large to address.
    pub fn strided(data: &'a mut [T], shape: [usize; 4], strides: Strides) -> Result<Self, AttentionError> {
        check(data.len(), shape, strides)?;
        Ok(TensorViewMut { data, shape, strides })
    }
}

impl<T> fmt::Debug for TensorView<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        shown::<T>(f, "TensorView", self.shape, self.strides)
    }
}

impl<T> fmt::Debug for TensorViewMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        shown::<T>(f, "TensorViewMut", self.shape, self.strides)
    }
}

/// Shows a view without its elements, which may be many.
fn shown<T>(f: &mut fmt::Formatter<'_>, name: &str, shape: [usize; 4], strides: Strides) -> fmt::Result {
    let element = std::any::type_name::<T>();
    f.debug_struct(name)
        .field("element", &element)
        .field("shape", &shape)
        .field("strides", &strides)
        .finish_non_exhaustive()
}

fn check(len: usize, shape: [usize; 4], strides: Strides) -> Result<(), AttentionError> {
    let needed = reach(shape, strides).ok_or_else(|| AttentionError::ViewTooLarge {
        shape,
        strides: format!("batch {}, head {}, row {}", strides.batch, strides.head, strides.row),
    })?;
    if len < needed {
        return Err(AttentionError::SliceTooShort { shape, needed, len });
    }
    Ok(())
}

/// Number of elements from the lowest to the highest that a view touches. `None` when it is over
/// `isize::MAX`.
fn reach([batch, heads, rows, dim]: [usize; 4], strides: Strides) -> Option<usize> {
    if [batch, heads, rows, dim].contains(&0) {
        return Some(0);
    }
    let steps = [(batch, strides.batch), (heads, strides.head), (rows, strides.row)];
    let span = steps.into_iter().try_fold(dim as u128, |sum, (extent, stride)| {
        sum.checked_add((extent as u128 - 1).checked_mul(u128::from(stride.unsigned_abs()))?)
    })?;
    usize::try_from(span).ok().filter(|&n| n <= isize::MAX as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_are_shown_without_their_elements() {
        let mut data = vec![0.0f32; 1000];
        let told = "{ element: \"f32\", shape: [1, 2, 5, 100], \
                    strides: Strides { batch: 1000, head: 500, row: 100 }, .. }";
        let view = TensorView::dense(&data, [1, 2, 5, 100], Layout::Bhsd).unwrap();
        assert_eq!(format!("{view:?}"), format!("TensorView {told}"));
        let view = TensorViewMut::dense(&mut data, [1, 2, 5, 100], Layout::Bhsd).unwrap();
        assert_eq!(format!("{view:?}"), format!("TensorViewMut {told}"));
    }
}
