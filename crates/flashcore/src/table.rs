//! Views of the tensors that scores and masks read.

use std::fmt;

use problem::{Elements, Table};

use crate::AttentionError;
use crate::error::refused;

/// A read-only tensor of 1 to 4 dimensions that a score or a mask reads: a bias, a boolean mask, or a table
/// of a program. Its elements are `f32`, [`half::f16`], [`half::bf16`], `i32`, `u8` or `bool`.
///
/// ```
/// use flashcore::TableView;
///
/// let bias = [0.0f32; 6];
/// TableView::dense(&bias, &[2, 3])?; // an array, a vector or a slice
/// let refused = TableView::dense(&bias.to_vec(), &[2, 4]).unwrap_err().to_string();
/// let told = "invalid value '6' for the number of elements of a table: expected 8 for shape [2, 4]";
/// assert_eq!(refused, told);
/// # Ok::<(), flashcore::AttentionError>(())
/// ```
#[derive(Clone)]
pub struct TableView<'a> {
    pub(crate) data: Elements<'a>,
    pub(crate) table: Table,
}

/// Shows the type, the shape and the strides.
impl fmt::Debug for TableView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TableView").field("table", &self.table).finish_non_exhaustive()
    }
}

impl<'a> TableView<'a> {
    /// A dense tensor, the last dimension contiguous.
    ///
    /// # Errors
    /// When the slice is too short, or the number of dimensions is not 1 to 4.
    pub fn dense(data: impl Into<Elements<'a>>, shape: &[usize]) -> Result<TableView<'a>, AttentionError> {
        let data = data.into();
        TableView::new(data, Table::dense(data.dtype(), shape))
    }

    /// A tensor with strides in elements, which are not negative. A stride of 0 repeats an element.
    ///
    /// # Errors
    /// When the slice is too short, the number of dimensions is not 1 to 4, or a stride is negative.
    pub fn strided(
        data: impl Into<Elements<'a>>,
        shape: &[usize],
        strides: &[i64],
    ) -> Result<TableView<'a>, AttentionError> {
        let data = data.into();
        TableView::new(
            data,
            Table { dtype: data.dtype(), extents: shape.to_vec(), strides: strides.to_vec() },
        )
    }

    fn new(data: Elements<'a>, table: Table) -> Result<TableView<'a>, AttentionError> {
        table.check().map_err(|reason| AttentionError::Table { reason })?;
        if data.len() < table.span() {
            let (len, needed, shape) = (data.len(), table.span(), table.extents);
            return Err(AttentionError::TableTooShort { len, needed, shape });
        }
        Ok(TableView { data, table })
    }

    /// The tensor as a table over `[batch, heads, seq_q, seq_kv]`: missing leading dimensions and extents of
    /// 1 are repeated.
    pub(crate) fn over_scores(
        &self,
        argument: &'static str,
        scores: [usize; 4],
    ) -> Result<Table, AttentionError> {
        let missing = scores.len() - self.table.extents.len();
        let mut strides = vec![0; missing];
        for (i, (&extent, &stride)) in self.table.extents.iter().zip(&self.table.strides).enumerate() {
            match extent {
                1 => strides.push(0),
                _ if extent == scores[missing + i] => strides.push(stride),
                _ => {
                    return Err(refused(
                        argument,
                        "shape",
                        format!("{:?}", self.table.extents),
                        format!("one that broadcasts to [batch, heads_q, seq_q, seq_kv] = {scores:?}"),
                    ));
                }
            }
        }
        Ok(Table { dtype: self.table.dtype, extents: scores.to_vec(), strides })
    }
}
