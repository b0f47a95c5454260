//! The calls on GPUs that a thread made last. The layers of a model repeat a few calls in which only
//! addresses and the stream differ. Such a call is recognised by the words in which its interface describes
//! it, and is launched without another check.

use std::cell::RefCell;

use flashcore::AttentionError;
use flashcore::gpu::Operand;
use flashcore::raw::{Ready, Repeated};

use crate::abi::CallArray;

/// Calls that a thread remembers.
const MOST: usize = 16;

/// The interfaces, whose descriptions differ.
#[derive(Clone, Copy, Debug)]
pub enum Interface {
    C,
    TvmFfi,
    Xla,
}

/// Words of the longest description, and addresses of the largest call. Others are not remembered.
const WORDS: usize = 128;
const ADDRESSES: usize = 16;

/// The description of a call by its interface, and its addresses in order.
#[derive(Debug)]
pub struct Described {
    /// All that decides what is launched, except for addresses and the stream.
    words: [u64; WORDS],
    count: usize,
    addresses: [u64; ADDRESSES],
    tensors: usize,
}

struct KnownCall {
    words: Box<[u64]>,
    repeated: Repeated,
}

thread_local! {
    static KNOWN: RefCell<Vec<KnownCall>> = const { RefCell::new(Vec::new()) };
}

impl Described {
    /// The beginning of the description of a call through this interface.
    #[inline]
    pub fn of(interface: Interface) -> Described {
        let (mut words, addresses) = ([0; WORDS], [0; ADDRESSES]);
        words[0] = interface as u64;
        Described { words, count: 1, addresses, tensors: 0 }
    }

    /// Adds words of the description.
    #[inline]
    pub fn words(&mut self, words: impl IntoIterator<Item = u64, IntoIter: ExactSizeIterator>) {
        let words = words.into_iter();
        let from = self.count;
        self.count = from + words.len();
        if let Some(free) = self.words.get_mut(from..self.count) {
            free.iter_mut().zip(words).for_each(|(free, word)| *free = word);
        }
    }

    /// Adds a text to the description.
    pub fn text(&mut self, text: &[u8]) {
        let word = |bytes: &[u8]| bytes.iter().fold(0, |word, &byte| word << 8 | u64::from(byte));
        self.words([text.len() as u64]);
        self.words(text.chunks(8).map(word));
    }

    /// Adds the address of the next array.
    pub fn address(&mut self, address: u64) {
        if let Some(free) = self.addresses.get_mut(self.tensors) {
            *free = address;
        }
        self.tensors += 1;
    }

    /// The words and the addresses, if there was room for them.
    fn parts(&self) -> Option<(&[u64], &[u64])> {
        Some((self.words.get(..self.count)?, self.addresses.get(..self.tensors)?))
    }

    /// Launches the call if the thread made it before.
    ///
    /// # Safety
    /// As [`Ready::enqueue`], for the call that is described.
    pub unsafe fn launch(&self, handle: u64) -> Option<Result<(), AttentionError>> {
        let (words, addresses) = self.parts()?;
        KNOWN.with_borrow(|all| {
            let known = all.iter().rev().find(|known| *known.words == *words)?;
            // SAFETY: the operands have the shapes, strides and types of the first call, whose description
            // was the same.
            Some(unsafe { known.repeated.enqueue(handle, addresses) })
        })
    }

    /// Remembers a call that was prepared. `arrays` says what each address is.
    pub fn keep(&self, arrays: impl Iterator<Item = Option<CallArray>>, ready: &Ready<'_>) {
        let operand = |array| match array {
            Some(CallArray::Pass(operand)) => Some(operand),
            _ => None,
        };
        let Some((words, addresses)) = self.parts() else { return };
        let given: Vec<(Option<Operand>, u64)> = arrays.map(operand).zip(addresses.iter().copied()).collect();
        let Some(repeated) = ready.repeated(&given) else { return };
        KNOWN.with_borrow_mut(|all| {
            if all.len() == MOST {
                all.remove(0);
            }
            all.push(KnownCall { words: words.into(), repeated });
        });
    }
}
