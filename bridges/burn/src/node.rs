//! Fused attention on `Flex`, and its node of the graph of `Autodiff`.

use std::sync::Arc;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Flex};
use flashcore::AttentionError;

use crate::rows::{backward, forward, with_dense_rows};
use crate::{AttentionModuleOptions, FusedAttention};

/// The result of an operation of burn, which cannot return an error.
fn accepted<T>(result: Result<T, AttentionError>) -> T {
    result.unwrap_or_else(|error| panic!("fused attention: {error}"))
}

impl FusedAttention for Flex {
    fn fused_attention(
        q: FlexTensor,
        k: FlexTensor,
        v: FlexTensor,
        options: AttentionModuleOptions,
    ) -> FlexTensor {
        let [q, k, v] = [q, k, v].map(with_dense_rows);
        accepted(forward([&q, &k, &v], options)).0
    }
}

impl<C: CheckpointStrategy> FusedAttention for Autodiff<Flex, C> {
    fn fused_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        options: AttentionModuleOptions,
    ) -> FloatTensor<Self> {
        let ((q, of_q), (k, of_k), (v, of_v)) = (q.into_parts(), k.into_parts(), v.into_parts());
        let inputs = [q, k, v].map(with_dense_rows);
        let (out, lse) = accepted(forward(inputs.each_ref(), options));
        match Node.prepare::<C>([of_q, of_k, of_v]).compute_bound().stateful() {
            OpsKind::Tracked(node) => {
                let saved = Saved { inputs, out: out.clone(), lse: lse.into(), options };
                node.finish(saved, out)
            }
            OpsKind::UnTracked(node) => node.finish(out),
        }
    }
}

/// The tensors that the backward pass reads. Their size is linear in the number of rows.
#[derive(Clone, Debug)]
struct Saved {
    inputs: [FlexTensor; 3],
    out: FlexTensor,
    lse: Arc<[f32]>,
    options: AttentionModuleOptions,
}

#[derive(Debug)]
struct Node;

impl Backward<Flex, 3> for Node {
    type State = Saved;

    fn backward(self, ops: Ops<Saved, 3>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let d_out = with_dense_rows(gradients.consume::<Flex>(&ops.node));
        let Saved { inputs, out, lse, options } = ops.state;
        let of_inputs = accepted(backward(inputs.each_ref(), &out, &lse, &d_out, options));
        for (parent, gradient) in ops.parents.into_iter().zip(of_inputs) {
            if let Some(parent) = parent {
                gradients.register::<Flex>(parent.id, gradient);
            }
        }
    }
}
