//! The operation that candle's graph holds: the forward pass, and the backward pass with the LSE that the
//! forward pass has left.

use std::ops::Deref;
use std::sync::OnceLock;

#[cfg(feature = "cuda")]
use candle::CudaStorage;
use candle::{CpuStorage, CustomOp3, DType, Error, Layout, Result, Shape, Storage, Tensor, bail};
use flashcore::gpu::{LengthArray, Operand};
use flashcore::raw::{CallOptions, View};
use flashcore::{ElementType, Pass, Tensor as TensorName};

use crate::memory::{Bound, Memory};
use crate::side::{SideOperand, stride, with_dense_rows};

/// Attention with its options and other inputs.
pub(crate) struct Attention {
    pub name: &'static str,
    pub options: CallOptions,
    pub side: Vec<SideOperand>,
    /// Present if an input has a gradient; filled by the forward pass.
    pub lse: Option<OnceLock<Storage>>,
}

/// The three inputs, each with its layout.
pub(crate) type Inputs<'a, S> = [(&'a S, &'a Layout); 3];

pub(crate) const INPUTS: [Operand; 3] = [Operand::Q, Operand::K, Operand::V];

/// The methods of [`CustomOp3`] for each kind of storage, which call one generic method.
macro_rules! computed_by {
    ($method:ident) => {
        computed_by!($method, cpu_fwd, CpuStorage);
        #[cfg(feature = "cuda")]
        computed_by!($method, cuda_fwd, CudaStorage);
    };
    ($method:ident, $name:ident, $storage:ty) => {
        fn $name(
            &self,
            q: &$storage,
            q_layout: &Layout,
            k: &$storage,
            k_layout: &Layout,
            v: &$storage,
            v_layout: &Layout,
        ) -> Result<($storage, Shape)> {
            self.$method([(q, q_layout), (k, k_layout), (v, v_layout)])
        }
    };
}

impl Attention {
    fn forward<S: Memory>(&self, inputs: Inputs<'_, S>) -> Result<(S, Shape)> {
        let [(q, q_layout), _, (_, v_layout)] = inputs;
        let dtype = q.dtype();
        let mut extents = q_layout.dims().to_vec();
        // The ranks are checked.
        let last = extents.len() - 1;
        extents[last] = v_layout.dims()[v_layout.dims().len() - 1];
        let shape = Shape::from(extents);
        // Nothing is written to rows that belong to no sequence.
        let used = Operand::Lengths(LengthArray::UsedQ);
        let has_padding = q_layout.dims().len() == 3 || self.side.iter().any(|side| side.operand == used);
        let mut out = S::output(q.device(), &shape, dtype, has_padding)?;
        let lse_view = if self.lse.is_some() { Some(self.lse_view(q_layout)?) } else { None };
        let lse = |(_, shape): &(View, Shape)| S::output(q.device(), shape, DType::F32, true);
        let mut lse = lse_view.as_ref().map(lse).transpose()?;
        let stream = q.stream();
        if !self.launched_again(inputs, &stream, [Some(&mut out), lse.as_mut()])? {
            let side = self.side_storages();
            let mut bound = Bound::new(&stream);
            self.bind(&mut bound, inputs, &side)?;
            bound.write(&mut out, &[(Operand::OUT, rows(dtype, &Layout::contiguous(&shape))?, 0)])?;
            if let (Some(lse), Some((view, _))) = (&mut lse, &lse_view) {
                bound.write(lse, &[(Operand::Lse, *view, 0)])?;
            }
            bound.run(q, &self.options, |ready| self.keep(inputs, &bound, ready))?;
        }
        if let (Some(cell), Some(lse)) = (&self.lse, lse) {
            // candle runs an operation once.
            let _ = cell.set(lse.into_storage());
        }
        Ok((out, shape))
    }

    /// `[batch, head, row]`, or `[head, row]` for packed queries.
    fn lse_view(&self, q: &Layout) -> Result<(View, Shape)> {
        let shape = match *q.dims() {
            [batch, rows, heads, _] => vec![batch, heads, rows],
            [rows, heads, _] => vec![heads, rows],
            _ => bail!("{} expects q of rank 3 or 4, got {:?}", self.name, q.shape()),
        };
        Ok((View::dense(ElementType::F32, &shape).map_err(Error::wrap)?, Shape::from(shape)))
    }

    fn side_storages(&self) -> Vec<(impl Deref<Target = Storage>, &SideOperand)> {
        self.side.iter().map(|side| (side.tensor.storage_and_layout().0, side)).collect()
    }

    /// Binds Q, K, V and the other inputs.
    fn bind<'a, S: Memory>(
        &self,
        bound: &mut Bound<'a, S>,
        inputs: Inputs<'a, S>,
        side: &'a [(impl Deref<Target = Storage>, &SideOperand)],
    ) -> Result<()> {
        let dtypes = inputs.map(|(storage, _)| storage.dtype());
        if dtypes[2] != dtypes[1] || ![dtypes[0], DType::F8E4M3].contains(&dtypes[1]) {
            bail!("{} expects q, k and v of one dtype, got {dtypes:?}", self.name)
        }
        for (operand, (storage, layout)) in INPUTS.into_iter().zip(inputs) {
            bound.read(operand, storage, rows(storage.dtype(), layout)?, layout.start_offset())?;
        }
        for (storage, side) in side {
            let SideOperand { operand, name, tensor, view } = side;
            let Some(storage) = S::of(storage).filter(|storage| storage.is_beside(inputs[0].0)) else {
                bail!("{name} must be on the device of q, got {:?}", tensor.device())
            };
            bound.read(*operand, storage, *view, tensor.layout().start_offset())?;
        }
        Ok(())
    }
}

impl CustomOp3 for Attention {
    fn name(&self) -> &'static str {
        self.name
    }

    computed_by!(forward);

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &Tensor,
        d_out: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let Some(lse) = self.lse.as_ref().and_then(OnceLock::get) else {
            return Err(Error::BackwardNotSupported { op: self.name });
        };
        let d_out = &with_dense_rows(d_out)?;
        let all = q.apply_op3_no_bwd(k, v, &Backward { forward: self, lse, out, d_out })?;
        let starts = starts([q, k, v].map(Tensor::elem_count));
        let part =
            |tensor: &Tensor, start| all.narrow(0, start, tensor.elem_count())?.reshape(tensor.shape());
        Ok((Some(part(q, starts[0])?), Some(part(k, starts[1])?), Some(part(v, starts[2])?)))
    }
}

/// The backward pass, as an operation whose one output holds dQ, dK and dV one after the other.
struct Backward<'a> {
    forward: &'a Attention,
    lse: &'a Storage,
    out: &'a Tensor,
    d_out: &'a Tensor,
}

/// The first element of each gradient, and the end of the last. Each begins at a multiple of 64 elements, for
/// copies of whole sectors.
fn starts(elements: [usize; 3]) -> [usize; 4] {
    let mut starts = [0; 4];
    for (i, elements) in elements.into_iter().enumerate() {
        starts[i + 1] = (starts[i] + elements).next_multiple_of(64);
    }
    starts
}

impl Backward<'_> {
    fn run<S: Memory>(&self, inputs: Inputs<'_, S>) -> Result<(S, Shape)> {
        let (q, q_layout) = inputs[0];
        let dtype = q.dtype();
        let starts = starts(inputs.map(|(_, layout)| layout.shape().elem_count()));
        let shape = Shape::from(starts[3]);
        let mut gradients = S::output(q.device(), &shape, dtype, true)?;
        let names = [TensorName::Dq, TensorName::Dk, TensorName::Dv].map(Operand::Tensor);
        let mut parts = Vec::with_capacity(3);
        for (i, operand) in names.into_iter().enumerate() {
            parts.push((operand, rows(dtype, &Layout::contiguous(inputs[i].1.shape()))?, starts[i]));
        }
        let (lse_view, _) = self.forward.lse_view(q_layout)?;
        let stream = q.stream();
        let side = self.forward.side_storages();
        let results = [(Operand::OUT, self.out), (Operand::Tensor(TensorName::DOut), self.d_out)];
        let results = results.map(|(operand, tensor)| (operand, tensor.storage_and_layout()));
        {
            let mut bound = Bound::new(&stream);
            self.forward.bind(&mut bound, inputs, &side)?;
            for (operand, (storage, layout)) in &results {
                let Some(storage) = S::of(storage).filter(|storage| storage.dtype() == dtype) else {
                    bail!("{} expects {operand} of q's dtype and device", self.forward.name)
                };
                bound.read(*operand, storage, rows(dtype, layout)?, layout.start_offset())?;
            }
            let Some(lse) = S::of(self.lse) else {
                bail!("{}: the forward pass ran on another device", self.forward.name)
            };
            bound.read(Operand::Lse, lse, lse_view, 0)?;
            bound.write(&mut gradients, &parts)?;
            let pass = Pass::Backward { deterministic: true, d_lse: false, wants: Default::default() };
            bound.run(q, &CallOptions { pass, ..self.forward.options.clone() }, |_| ())?;
        }
        Ok((gradients, shape))
    }
}

impl CustomOp3 for Backward<'_> {
    fn name(&self) -> &'static str {
        "flash-attn-backward"
    }

    computed_by!(run);
}

/// A tensor `[batch, row, head, dim]` or `[row, head, dim]` with FlashCore's order of dimensions.
pub(crate) fn rows(dtype: DType, layout: &Layout) -> Result<View> {
    let dtype = match dtype {
        DType::F32 => ElementType::F32,
        DType::F16 => ElementType::F16,
        DType::BF16 => ElementType::Bf16,
        DType::F8E4M3 => ElementType::E4m3,
        dtype => bail!("flash-attn is only supported for f32/f16/bf16 ({dtype:?})"),
    };
    let strides: Result<Vec<i64>> = layout.stride().iter().map(|&n| stride(n)).collect();
    let (shape, strides) = match (layout.dims(), &strides?[..]) {
        (&[batch, row, head, dim], &[b, r, h, d]) => ([batch, head, row, dim], [b, h, r, d]),
        (&[row, head, dim], &[r, h, d]) => ([1, head, row, dim], [0, h, r, d]),
        _ => bail!("flash-attn expects tensors of rank 3 or 4, got {:?}", layout.shape()),
    };
    View::new(dtype, &shape, &strides).map_err(Error::wrap)
}
