//! From a mnemonic with its modifiers to an [`Op`].

mod arith;
mod bulk;
mod memory;
mod sync;
mod tensor;

use super::Failure;
use super::modifiers::Modifiers;
use crate::{BinaryOp, GridDependency, Op, RegisterChange, TernaryOp, UnaryOp};

/// The operation that a mnemonic names. What only operands decide (`cp.async` with a
/// predicate, A of `wgmma` in registers) is left as it is without.
pub(super) fn op(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    let op = named(m)?;
    m.finish()?;
    Ok(op)
}

fn named(m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    match m.base {
        "add" | "sub" | "addc" | "subc" | "mad" | "madc" | "mul" | "mul24" | "mad24" => {
            arith::integer_or_float(m)
        }
        "bfind" => arith::bfind(m),
        "setp" => arith::setp(m),
        "set" => arith::set(m),
        "selp" => Ok(Op::Selp(m.ty()?)),
        "slct" => arith::slct(m),
        "testp" => arith::testp(m),
        "lop3" | "fns" | "shf" | "bmsk" | "prmt" => arith::bits32(m),
        "bfe" => Ok(Op::Bfe(m.ty()?)),
        "bfi" => Ok(Op::Bfi(m.ty()?)),
        "szext" => arith::szext(m),
        "dp4a" | "dp2a" => arith::dot(m),
        "mov" => Ok(Op::Mov(m.ty()?)),
        "cvt" => arith::cvt(m),

        "cvta" | "isspacep" | "mapa" | "getctarank" => memory::address(m),
        "ld" | "ldu" | "st" => memory::load_store(m),
        "atom" | "red" => memory::atomic(m),
        "prefetch" | "prefetchu" => memory::prefetch(m),
        "discard" => memory::discard(m),
        "createpolicy" => memory::create_policy(m),
        "cp" => memory::copy(m),

        "ldmatrix" | "stmatrix" => tensor::matrix_access(m),
        "movmatrix" => tensor::movmatrix(m),
        "mma" => tensor::mma(m),
        "wmma" => tensor::wmma(m),
        "wgmma" => tensor::wgmma(m),

        "shfl" | "vote" | "match" | "redux" | "activemask" | "elect" => sync::warp(m),
        "bar" | "barrier" => sync::barrier(m),
        "membar" | "fence" => sync::fence(m),
        "mbarrier" => sync::mbarrier(m),

        "bra" => Ok(Op::Bra { uni: m.take("uni") }),
        "brx" => {
            m.require("idx")?;
            Ok(Op::BrxIdx { uni: m.take("uni") })
        }
        "call" => Ok(Op::Call { uni: m.take("uni") }),
        "ret" => Ok(Op::Ret { uni: m.take("uni") }),
        "exit" => Ok(Op::Exit),
        "trap" => Ok(Op::Trap),
        "brkpt" => Ok(Op::Brkpt),
        "nanosleep" => m.require("u32").map(|()| Op::Nanosleep),
        "pmevent" => Ok(Op::Pmevent),
        "setmaxnreg" => {
            let change = m.one("`.inc` or `.dec`", RegisterChange::from_name)?;
            for word in ["sync", "aligned", "u32"] {
                m.require(word)?;
            }
            Ok(Op::Setmaxnreg(change))
        }
        "griddepcontrol" => {
            let what = m.one("`.launch_dependents` or `.wait`", GridDependency::from_name)?;
            Ok(Op::Griddepcontrol(what))
        }
        other => by_name(other, m),
    }
}

/// Operations whose whole name is in a table: one, two or three sources of one type with arithmetic modifiers.
fn by_name(name: &str, m: &mut Modifiers<'_>) -> Result<Op, Failure> {
    if let Some(op) = UnaryOp::from_name(name) {
        let mods = arith::modifiers(m);
        return Ok(Op::Unary(op, m.ty()?, mods));
    }
    if let Some(op) = BinaryOp::from_name(name) {
        let mods = arith::modifiers(m);
        return Ok(Op::Binary(op, m.ty()?, mods));
    }
    if let Some(op) = TernaryOp::from_name(name) {
        let mods = arith::modifiers(m);
        return Ok(Op::Ternary(op, m.ty()?, mods));
    }
    Err(m.unknown())
}
