//! The calls on GPUs that a thread made last through an interface for other languages and frameworks. The
//! layers of a model repeat a few calls in which only addresses and the stream differ. Such a call is
//! recognised by the words in which its interface describes it, and is launched without another check.

use std::cell::RefCell;

use problem::Operand;

use super::Ready;
use super::repeated::Repeated;
use crate::AttentionError;

/// Calls that a thread remembers.
const MOST: usize = 16;

/// The interfaces, whose descriptions differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interface {
    /// `flashcore.h`.
    C,
    /// TVM-FFI.
    TvmFfi,
    /// XLA's foreign functions.
    Xla,
    /// Operations of candle.
    Candle,
}

/// A call as its interface describes it.
pub trait Described {
    /// The interface.
    fn interface(&self) -> Interface;

    /// Hands over the words that decide what is launched, except for addresses and the stream, in pieces,
    /// until `next` returns `false`. Returns whether it never did.
    fn words(&self, next: impl FnMut(&[u64]) -> bool) -> bool;

    /// The address of the array with this index. The words say how many there are.
    fn address(&self, index: usize) -> u64;
}

struct KnownCall {
    interface: Interface,
    words: Box<[u64]>,
    repeated: Repeated,
}

impl KnownCall {
    #[inline]
    fn is(&self, call: &impl Described) -> bool {
        let mut rest = &*self.words;
        let next = |words: &[u64]| match rest.split_at_checked(words.len()) {
            Some((known, after)) if known == words => {
                rest = after;
                true
            }
            _ => false,
        };
        let alike = self.interface == call.interface() && call.words(next) && rest.is_empty();
        alike && self.repeated.fits(|index| call.address(index))
    }
}

thread_local! {
    static KNOWN: RefCell<Vec<KnownCall>> = const { RefCell::new(Vec::new()) };
}

/// Launches a call on a stream, by the driver's handle, if the thread made it before ([`keep_call`]).
///
/// # Safety
/// As [`Ready::enqueue`], for the call.
#[inline]
pub unsafe fn launch_again(call: &impl Described, handle: u64) -> Option<Result<(), AttentionError>> {
    KNOWN.with_borrow(|all| {
        let known = all.iter().rev().find(|known| known.is(call))?;
        // SAFETY: the operands have the shapes, strides and types of the first call, whose description was
        // the same.
        Some(unsafe { known.repeated.enqueue(handle, |index| call.address(index)) })
    })
}

/// Remembers a call that was prepared. `operands` says what each address is; `None` for one that is not an
/// operand of the pass.
pub fn keep_call(
    call: &impl Described,
    operands: impl IntoIterator<Item = Option<Operand>>,
    ready: &Ready<'_>,
) {
    let operands = operands.into_iter().enumerate();
    let given: Vec<_> = operands.map(|(index, operand)| (operand, call.address(index))).collect();
    let Some(repeated) = ready.repeated(&given) else { return };
    let mut words = Vec::new();
    call.words(|next| {
        words.extend_from_slice(next);
        true
    });
    KNOWN.with_borrow_mut(|all| {
        if all.len() == MOST {
            all.remove(0);
        }
        all.push(KnownCall { interface: call.interface(), words: words.into(), repeated });
    });
}
