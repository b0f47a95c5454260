//! Inputs beside Q, K and V, and the views of candle's tensors.

use std::borrow::Cow;

use candle::{DType, Error, Result, Tensor, bail};
use flashcore::gpu::Operand;
use flashcore::raw::View;
use flashcore::{ElementType, Expr, Program};

/// An input beside Q, K and V. It has no gradient.
pub(crate) struct SideOperand {
    pub operand: Operand,
    /// The name of the argument.
    pub name: &'static str,
    pub tensor: Tensor,
    pub view: View,
}

impl SideOperand {
    /// A dense array of integers: u32 is read as i32, so that numbers beyond i32 become negative and are
    /// refused.
    pub fn integers(operand: Operand, name: &'static str, tensor: &Tensor) -> Result<SideOperand> {
        if !matches!(tensor.dtype(), DType::U32 | DType::I32) {
            bail!("{name} must be u32 or i32, got {:?}", tensor.dtype())
        }
        let tensor = tensor.contiguous()?;
        let view = view(ElementType::I32, &tensor)?;
        Ok(SideOperand { operand, name, tensor, view })
    }

    /// ALiBi's slopes of the query heads, as the table `[sequence, head]` of a program.
    pub fn slopes(slopes: &Tensor, sequences: usize, heads: usize) -> Result<SideOperand> {
        let name = "alibi_slopes";
        check_heads(name, slopes, heads)?;
        if slopes.track_op() {
            bail!("{name} would need a gradient, which is not computed: pass {name}.detach()")
        }
        let strides = [0, stride(slopes.stride()[0])?];
        let view = View::new(ElementType::F32, &[sequences, heads], &strides).map_err(Error::wrap)?;
        Ok(SideOperand { operand: Operand::Table(0), name, tensor: slopes.clone(), view })
    }
}

/// The lengths of the sequences between cumulative lengths.
pub(crate) fn lengths(name: &str, starts: &Tensor) -> Result<Tensor> {
    if !matches!(starts.dtype(), DType::U32 | DType::I32) {
        bail!("{name} must be u32 or i32, got {:?}", starts.dtype())
    }
    let sequences = starts.dims1()?.saturating_sub(1);
    // Bits of i32 that are negative would wrap around in u32.
    let starts = starts.to_dtype(DType::I64)?;
    let lengths = (starts.narrow(0, 1, sequences)? - starts.narrow(0, 0, sequences)?)?;
    lengths.clamp(-1i64, i64::from(i32::MAX))?.to_dtype(DType::U32)
}

pub(crate) fn program(expr: &Expr) -> Result<Program> {
    Program::new(expr).map_err(Error::wrap)
}

/// Rejects a tensor that is not f32 with one number for each head.
pub(crate) fn check_heads(name: &'static str, tensor: &Tensor, heads: usize) -> Result<()> {
    if tensor.dtype() != DType::F32 {
        bail!("DType mismatch {name} {:?}, expected {:?}", tensor.dtype(), DType::F32)
    }
    if tensor.dims() != [heads] {
        bail!("shape mismatch {name} {:?}, expected {:?}", tensor.shape(), [heads])
    }
    Ok(())
}

pub(crate) fn view(dtype: ElementType, tensor: &Tensor) -> Result<View> {
    let strides: Result<Vec<i64>> = tensor.stride().iter().map(|&n| stride(n)).collect();
    View::new(dtype, tensor.dims(), &strides?).map_err(Error::wrap)
}

pub(crate) fn stride(stride: usize) -> Result<i64> {
    i64::try_from(stride).map_err(Error::wrap)
}

/// The tensor, copied if its last dimension is strided.
pub(crate) fn with_dense_rows(tensor: &Tensor) -> Result<Cow<'_, Tensor>> {
    match (tensor.dims().last(), tensor.stride().last()) {
        (Some(&extent), Some(&stride)) if extent > 1 && stride != 1 => tensor.contiguous().map(Cow::Owned),
        _ => Ok(Cow::Borrowed(tensor)),
    }
}
