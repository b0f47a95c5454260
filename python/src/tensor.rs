//! A tensor as the package describes it.

use problem::Strides;

use crate::error::Error;

/// Address of element (0, 0, 0, 0), shape and strides in elements, both in the order batch, head, sequence,
/// dim.
pub type Described = (usize, [usize; 4], [i64; 4]);

/// The strides of the rows of a tensor. The last dimension must be contiguous.
pub fn strides(name: &str, &(_, shape, [batch, head, row, dim]): &Described) -> Result<Strides, Error> {
    if dim != 1 && shape[3] > 1 && !shape.contains(&0) {
        let message = format!("{name}'s last dimension has stride {dim}; it must be contiguous (stride 1)");
        return Err(Error::Argument(message));
    }
    Ok(Strides { batch, head, row })
}
