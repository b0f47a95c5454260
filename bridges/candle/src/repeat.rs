//! Calls that a thread made before. FlashCore launches them on other addresses without another check.
#![allow(unsafe_code, reason = "FlashCore takes addresses")]

use candle::{Error, Result};
use flashcore::gpu::Operand;
use flashcore::raw::{Described, Interface, Ready, keep_call, launch_again};

use crate::memory::{Bound, Memory};
use crate::op::{Attention, INPUTS, Inputs};

/// Words of the options, and of each layout.
const OF_OPTIONS: usize = 5;
const OF_LAYOUT: usize = 8;

/// A call on a GPU whose only operands are Q, K, V, O and perhaps the LSE, in this order.
struct PlainCall {
    words: [u64; OF_OPTIONS + 3 * OF_LAYOUT],
    addresses: [u64; 5],
}

impl Described for PlainCall {
    fn interface(&self) -> Interface {
        Interface::Candle
    }

    #[inline]
    fn words(&self, mut next: impl FnMut(&[u64]) -> bool) -> bool {
        next(&self.words)
    }

    #[inline]
    fn address(&self, index: usize) -> u64 {
        self.addresses[index]
    }
}

impl Attention {
    /// The call without other operands; `None` for tensors of another rank than 4.
    fn plain<S: Memory>(
        &self,
        inputs: Inputs<'_, S>,
        device: usize,
        addresses: [u64; 5],
    ) -> Option<PlainCall> {
        let [q, k, v] = inputs.map(|(storage, _)| storage.dtype() as u64);
        // Those options that are not here are set for other operands alone.
        let (options, band) = (&self.options, self.options.band);
        let limit = |keys: Option<u32>| keys.map_or(u64::MAX, u64::from);
        let factor = |factor: Option<f32>| factor.map_or(u64::MAX, |factor| factor.to_bits().into());
        let kinds = q << 24 | k << 16 | v << 8 | u64::from(self.lse.is_some());
        let [before, after] = [limit(band.before), limit(band.after)];
        let mut words = [0; OF_OPTIONS + 3 * OF_LAYOUT];
        let (of_options, of_layouts) = words.split_at_mut(OF_OPTIONS);
        of_options.copy_from_slice(&[
            (device as u64) << 32 | kinds,
            before << 32 | after & u64::from(u32::MAX),
            u64::from(band.before.is_some()) << 1 | u64::from(band.after.is_some()),
            factor(options.scale),
            factor(options.softcap),
        ]);
        for (words, (_, layout)) in of_layouts.chunks_exact_mut(OF_LAYOUT).zip(inputs) {
            let (&[batch, row, head, dim], &[b, r, h, d]) = (layout.dims(), layout.stride()) else {
                return None;
            };
            words.copy_from_slice(&[batch, row, head, dim, b, r, h, d].map(|n| n as u64));
        }
        Some(PlainCall { words, addresses })
    }

    /// Launches the forward pass if the thread made such a call before. Returns whether it did.
    pub(crate) fn launched_again<S: Memory>(
        &self,
        inputs: Inputs<'_, S>,
        stream: &S::Stream,
        outputs: [Option<&mut S>; 2],
    ) -> Result<bool> {
        let Some((device, handle)) = inputs[0].0.gpu_stream(stream).filter(|_| self.side.is_empty()) else {
            return Ok(false);
        };
        let mut addresses = [0; 5];
        let mut guards = [const { None }; 5];
        for ((storage, layout), (address, guard)) in
            inputs.into_iter().zip(addresses.iter_mut().zip(&mut guards))
        {
            let (start, held) = storage.address(stream)?;
            *address = start + (layout.start_offset() * storage.dtype().size_in_bytes()) as u64;
            *guard = Some(held);
        }
        for (output, (address, guard)) in
            outputs.into_iter().flatten().zip(addresses.iter_mut().zip(&mut guards).skip(3))
        {
            let (start, held) = output.address_mut(stream)?;
            (*address, *guard) = (start, Some(held));
        }
        let Some(call) = self.plain(inputs, device, addresses) else { return Ok(false) };
        // SAFETY: as in `Bound::run`; the outputs have the layouts that follow from the inputs'.
        let launched = unsafe { launch_again(&call, handle) };
        launched.map_or(Ok(false), |launched| launched.map(|()| true).map_err(Error::wrap))
    }

    /// Remembers a forward pass that was enqueued on bound operands.
    pub(crate) fn keep<S: Memory>(&self, inputs: Inputs<'_, S>, bound: &Bound<'_, S>, ready: &Ready<'_>) {
        let Some((device, _)) = inputs[0].0.gpu_stream(bound.stream).filter(|_| self.side.is_empty()) else {
            return;
        };
        let operands =
            INPUTS.into_iter().chain([Operand::OUT]).chain(self.lse.as_ref().map(|_| Operand::Lse));
        let mut addresses = [0; 5];
        for (address, operand) in addresses.iter_mut().zip(operands.clone()) {
            *address = bound.address(operand);
        }
        if let Some(call) = self.plain(inputs, device, addresses) {
            keep_call(&call, operands.map(Some), ready);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use candle::{CpuStorage, Layout, Shape};
    use flashcore::raw::CallOptions;
    use flashcore::{Band, Pass};
    use half::{bf16, f16};

    use super::*;

    fn words(
        attention: &Attention,
        storages: [&CpuStorage; 3],
        layouts: [&Layout; 3],
        device: usize,
    ) -> Vec<u64> {
        let inputs = [0, 1, 2].map(|i| (storages[i], layouts[i]));
        attention.plain(inputs, device, [0; 5]).unwrap().words.to_vec()
    }

    #[test]
    fn other_calls_have_other_words() {
        let attention = |options, lse| Attention { name: "flash-attn", options, side: Vec::new(), lse };
        let of = |options| attention(options, None);
        let plain = || CallOptions { scale: Some(0.5), ..CallOptions::default() };
        let band = |before, after| of(CallOptions { band: Band { before, after, ..Band::FULL }, ..plain() });
        let attentions = [
            of(plain()),
            of(CallOptions { scale: Some(0.25), ..plain() }),
            of(CallOptions { softcap: Some(0.5), ..plain() }),
            band(None, Some(0)),
            band(Some(0), None),
            band(Some(0), Some(0)),
            band(Some(u32::MAX), Some(0)),
            attention(CallOptions { pass: Pass::forward(true), ..plain() }, Some(OnceLock::new())),
        ];
        let (half, brain) = (CpuStorage::F16(vec![f16::ONE; 64]), CpuStorage::BF16(vec![bf16::ONE; 64]));
        let contiguous = Layout::contiguous((1, 2, 4, 8));
        let transposed = Layout::contiguous((1, 4, 2, 8)).transpose(1, 2).unwrap();
        let shorter = Layout::contiguous((1, 1, 4, 8));
        let one = |attention, storage, layouts| words(attention, [storage; 3], layouts, 0);
        let mut all: Vec<_> = attentions.iter().map(|of| one(of, &half, [&contiguous; 3])).collect();
        for other in [&transposed, &shorter] {
            for index in 0..3 {
                let mut layouts = [&contiguous; 3];
                layouts[index] = other;
                all.push(one(&attentions[0], &half, layouts));
            }
        }
        all.push(one(&attentions[0], &brain, [&contiguous; 3]));
        for index in 0..3 {
            let mut storages = [&half; 3];
            storages[index] = &brain;
            all.push(words(&attentions[0], storages, [&contiguous; 3], 0));
        }
        all.push(words(&attentions[0], [&half; 3], [&contiguous; 3], 1));
        for (index, words) in all.iter().enumerate() {
            assert!(!all[..index].contains(words), "{index}");
        }
        // An offset is part of the addresses alone.
        let part = Layout::new(Shape::from((1, 2, 4, 8)), contiguous.stride().to_vec(), 16);
        assert_eq!(one(&attentions[0], &half, [&part; 3]), all[0]);
        let flat = Layout::contiguous((2, 4, 8));
        assert!(attentions[0].plain([(&half, &flat); 3], 0, [0; 5]).is_none());
    }
}
