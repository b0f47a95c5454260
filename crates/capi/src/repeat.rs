//! The calls on GPUs that a thread made last. The layers of a model repeat a few calls in which only addresses
//! and the stream differ. Such a call is recognised by the words in which its interface describes it, and is
//! launched without another check.

use std::cell::RefCell;

use flashcore::AttentionError;
use flashcore::gpu::Operand;
use flashcore::raw::{Ready, Repeated};
use smallvec::SmallVec;

use crate::abi::CallArray;
use crate::spec::HandedTensor;

/// Calls that a thread remembers.
const MOST: usize = 16;

/// The description of a call by its interface, and its addresses in order.
#[derive(Debug)]
pub struct Described {
    /// All that decides what is launched, except for addresses and the stream.
    words: SmallVec<[u64; 64]>,
    addresses: SmallVec<[u64; 8]>,
}

struct KnownCall {
    words: Box<[u64]>,
    repeated: Repeated,
}

thread_local! {
    static KNOWN: RefCell<Vec<KnownCall>> = const { RefCell::new(Vec::new()) };
}

impl Described {
    /// The description of a call through the interface of this name.
    pub fn of(interface: &str) -> Described {
        let mut described = Described { words: SmallVec::new(), addresses: SmallVec::new() };
        described.text(interface.as_bytes());
        described
    }

    /// Adds words of the description.
    pub fn words(&mut self, words: &[u64]) {
        self.words.extend_from_slice(words);
    }

    /// Adds a text to the description.
    pub fn text(&mut self, text: &[u8]) {
        self.words.push(text.len() as u64);
        let word = |bytes: &[u8]| bytes.iter().fold(0, |word, &byte| word << 8 | u64::from(byte));
        self.words.extend(text.chunks(8).map(word));
    }

    /// Adds the address of the next array.
    pub fn address(&mut self, address: u64) {
        self.addresses.push(address);
    }

    /// Adds the next tensor.
    pub fn tensor(&mut self, tensor: &HandedTensor<'_>) {
        let has_strides = u64::from(tensor.strides.is_some());
        self.words.push(u64::from(tensor.dtype) << 32 | has_strides << 16 | tensor.shape.len() as u64);
        let numbers = tensor.shape.iter().chain(tensor.strides.unwrap_or_default());
        self.words.extend(numbers.map(|&number| number as u64));
        self.addresses.push(tensor.address);
    }

    /// Launches the call if the thread made it before.
    ///
    /// # Safety
    /// As [`Ready::enqueue`], for the call that is described.
    pub unsafe fn launch(&self, handle: u64) -> Option<Result<(), AttentionError>> {
        KNOWN.with_borrow(|all| {
            let known = all.iter().rev().find(|known| *known.words == *self.words)?;
            // SAFETY: the operands have the shapes, strides and types of the first call, whose description
            // was the same.
            Some(unsafe { known.repeated.enqueue(handle, &self.addresses) })
        })
    }

    /// Remembers a call that was prepared. `arrays` says what each address is.
    pub fn keep(&self, arrays: impl Iterator<Item = Option<CallArray>>, ready: &Ready<'_>) {
        let operand = |array| match array {
            Some(CallArray::Pass(operand)) => Some(operand),
            _ => None,
        };
        let given: SmallVec<[(Option<Operand>, u64); 16]> =
            arrays.map(operand).zip(self.addresses.iter().copied()).collect();
        let Some(repeated) = ready.repeated(&given) else { return };
        KNOWN.with_borrow_mut(|all| {
            if all.len() == MOST {
                all.remove(0);
            }
            all.push(KnownCall { words: self.words.to_vec().into(), repeated });
        });
    }
}
