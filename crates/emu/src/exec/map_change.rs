//! Changes tensor maps in memory, and orders the changes for the copies that use the maps (PTX ISA,
//! "tensormap.replace", "tensormap.cp_fenceproxy", "fence.proxy").

use ptx::{FenceSem, Op, Space, TensorMapField};

use super::Env;
use super::access::{Site, addresses, based, plain, same_space};
use super::map_image::{BYTES, is_changed, map_index, replace};
use super::registers::for_lanes;
use super::run::Flow;
use super::warp::{Split, State, Warp};
use crate::EmuError;
use crate::decode::{Inst, Program};
use crate::memory::resolve;
use crate::order::{Access, ProxySpace, Strength};
use crate::report::HazardKind;

/// Bytes of one access to an image.
const PIECE: usize = 16;

fn piece_site(inst: &Inst, space: Space) -> Site<'_> {
    Site { inst, space, bytes: PIECE as u32, strength: Strength::Weak }
}

impl Program {
    /// Whether the kernel changes tensor maps. If so, it may copy one.
    pub fn changes_maps(&self) -> bool {
        let changes = |inst: &Inst| matches!(inst.op, Op::TensormapReplace { .. } | Op::TensormapCopy(_));
        self.code.iter().any(changes)
    }
}

impl Env<'_> {
    /// Executes `tensormap.replace`: reads and writes the whole map.
    pub(super) fn replace_field(&mut self, warp: &mut Warp, inst: &Inst, field: TensorMapField, mask: u32) {
        let mut places = addresses(&warp.registers, inst);
        let mut left = mask;
        while left != 0 {
            let (space, lanes) = same_space(inst.space, left, &mut places);
            left &= !lanes;
            for_lanes(lanes, |lane| {
                let Some(mut image) = self.load_image(warp, inst, lane, (space, places[lane])) else {
                    return;
                };
                if map_index(&image).is_none() {
                    self.report(HazardKind::OutOfBounds, inst, warp.index, lane, None, || {
                        format!("the address {:#x} is not that of a tensor map", places[lane])
                    });
                    return;
                }
                let value = warp.registers.lane(inst.s[0], lane);
                if !replace(&mut image, field, inst.target as usize, value) {
                    let what = format!("tensor maps whose {} is {value}", field.name());
                    self.log.stopped = Some(EmuError::Unsupported { line: inst.line, what });
                    return;
                }
                self.store_image(warp, inst, lane, (space, places[lane]), &image);
            });
        }
    }

    /// Executes `tensormap.cp_fenceproxy`: the first lane copies the map for the warp.
    pub(super) fn copy_map(&mut self, warp: &mut Warp, split: &mut Split, inst: &Inst, mask: u32) -> Flow {
        if mask != warp.live && !split.forced {
            return Flow::Wait(State::Lanes(!0));
        }
        split.forced = false;
        let lane = mask.trailing_zeros() as usize;
        let from = addresses(&warp.registers, inst)[lane];
        let to = resolve(based(&warp.registers, inst.source.0, inst.source.1)[lane]).1;
        if let Some(image) = self.load_image(warp, inst, lane, (Space::Shared, from)) {
            self.store_image(warp, inst, lane, (Space::Global, to), &image);
        }
        warp.view.fence_proxy(mask, warp.live, ProxySpace::TensorMap);
        Flow::Next
    }

    /// Executes `fence.proxy.tensormap`. A release orders what the thread knows of; after an acquire, the
    /// thread may use the map as it is now. Scopes are not distinguished, which is lenient.
    pub(super) fn fence_map(&mut self, warp: &mut Warp, inst: &Inst, sem: FenceSem, mask: u32) {
        if sem == FenceSem::Release {
            return warp.view.fence_proxy(mask, warp.live, ProxySpace::TensorMap);
        }
        let places = addresses(&warp.registers, inst);
        for_lanes(mask, |lane| {
            if let (Space::Global, address) = resolve(places[lane])
                && let Some(image) = self.facts.context.global.image(address)
            {
                self.acquired_maps.insert((address, warp.index, lane), image);
            }
        });
    }

    /// Checks that a copy may use a map in global memory: what other threads wrote there, and this one, was
    /// released to the proxy of tensor maps, and acquired after the last change.
    pub(super) fn check_map_use(
        &mut self,
        warp: &Warp,
        inst: &Inst,
        lane: usize,
        (address, image): (u64, &[u8; BYTES]),
    ) {
        let context = self.facts.context;
        if !context.options.checks.races || !context.global.find(address).is_some_and(|(r, _)| r.watched()) {
            return;
        }
        let site = piece_site(inst, Space::Global);
        let place = (Space::Global, address);
        for at in (address..).step_by(PIECE).take(BYTES / PIECE) {
            let access = Access { proxy: Some(ProxySpace::TensorMap), ..plain(warp, &site, lane) };
            match self.order.grid.shadow.read(at, PIECE as u64, &access) {
                Some(c) if c.unfenced => {
                    let line = self.line(c.pc);
                    self.report(HazardKind::MissingProxyFence, inst, warp.index, lane, Some(place), || {
                        format!(
                            "uses a tensor map that line {line} wrote, without a release by \
                             fence.proxy.tensormap::generic or tensormap.cp_fenceproxy"
                        )
                    });
                    return;
                }
                Some(c) => return self.report_conflict(inst, warp.index, lane, false, &c, place),
                None => {}
            }
        }
        if is_changed(image) && self.acquired_maps.get(&(address, warp.index, lane)) != Some(image) {
            self.report(HazardKind::MissingProxyFence, inst, warp.index, lane, Some(place), || {
                "uses a tensor map that was changed, and the thread has not acquired it by \
                 fence.proxy.tensormap::generic.acquire"
                    .into()
            });
        }
    }

    fn load_image(
        &mut self,
        warp: &Warp,
        inst: &Inst,
        lane: usize,
        (space, address): (Space, u64),
    ) -> Option<[u8; BYTES]> {
        if !address.is_multiple_of(BYTES as u64) {
            self.report(HazardKind::Misaligned, inst, warp.index, lane, Some((space, address)), || {
                format!("a tensor map at {address:#x}, which is not a multiple of {BYTES}")
            });
            return None;
        }
        let mut image = [0; BYTES];
        for (at, piece) in (address..).step_by(PIECE).zip(image.chunks_exact_mut(PIECE)) {
            let chunk = self.load_lane(warp, &piece_site(inst, space), lane, at)?;
            piece
                .chunks_exact_mut(4)
                .zip(chunk)
                .for_each(|(four, word)| four.copy_from_slice(&word.to_le_bytes()));
        }
        Some(image)
    }

    fn store_image(
        &mut self,
        warp: &mut Warp,
        inst: &Inst,
        lane: usize,
        (space, address): (Space, u64),
        image: &[u8; BYTES],
    ) {
        for (at, piece) in (address..).step_by(PIECE).zip(image.chunks_exact(PIECE)) {
            let chunk = crate::memory::load_bytes(piece, 0, PIECE);
            self.store_lane(warp, &piece_site(inst, space), lane, at, &chunk);
        }
    }
}
