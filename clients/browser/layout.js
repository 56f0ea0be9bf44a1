'use strict';
/**
 * What lies where in a world that is known, drawn under the map. The world repeats after `period` in both directions; its
 * axes are those of the wire, but in metres and from a corner of its own.
 *
 * @typedef {{label: string, x: number, z: number, radius: number, colour: string}} Thing
 *
 * @typedef {object} Layout
 * @property {number} period             Metres.
 * @property {number} metres_per_unit    Metres of one unit of a pose.
 * @property {Thing[]} objects
 * @property {Thing[]} areas             Lie flat.
 * @property {{width: number, x: number[], z: number[]}} paths  Along z at each `x`, along x at each `z`.
 * @property {Record<string, {x: number, z: number, heading_deg: number}>} starts  First camera of each start image.
 */

const AREA_ALPHA = 0.35;
const PATH_ALPHA = 0.16;

/**
 * Turns and moves a canvas, whose origin is the first camera with its view upwards, so that it measures metres of the world.
 * @param {CanvasRenderingContext2D} context
 * @param {Layout} layout
 * @param {{x: number, z: number, heading_deg: number}} start
 */
function intoWorld(context, { metres_per_unit: metres }, { x, z, heading_deg: heading }) {
  context.scale(1 / metres, 1 / metres);
  context.rotate((-heading * Math.PI) / 180);
  // Up on the canvas is forward, and forward is z.
  context.scale(1, -1);
  context.translate(-x, -z);
}

/**
 * Place of a pose in the world, in metres.
 * @param {Layout} layout
 * @param {{x: number, z: number, heading_deg: number}} start
 * @param {{x: number, z: number}} place
 */
export function metresOf({ metres_per_unit: metres }, start, place) {
  const heading = (start.heading_deg * Math.PI) / 180;
  const [sin, cos] = [Math.sin(heading), Math.cos(heading)];
  return {
    x: start.x + metres * (place.x * cos + place.z * sin),
    z: start.z + metres * (place.z * cos - place.x * sin),
  };
}

/**
 * Where the world's north is, clockwise from the first view of a run; that view where nobody knows.
 * @param {Layout | null} layout
 * @param {string | null} startName   Start image of the run.
 */
export function northRad(layout, startName) {
  const start = startName === null ? undefined : layout?.starts[startName];
  return start === undefined ? 0 : (-start.heading_deg * Math.PI) / 180;
}

/**
 * Draw what lies within `reach` of a place.
 * @param {CanvasRenderingContext2D} context  Its origin is the first camera, its unit that of the poses.
 * @param {Layout} layout
 * @param {string} startName   Start image of the run.
 * @param {{x: number, z: number}} place
 * @param {number} reach       In units of the poses.
 */
export function drawLayout(context, layout, startName, place, reach) {
  const start = layout.starts[startName];
  if (start === undefined) return;
  const centre = metresOf(layout, start, place);
  const around = Math.SQRT2 * reach * layout.metres_per_unit;
  const [fromX, toX, fromZ, toZ] = [centre.x - around, centre.x + around, centre.z - around, centre.z + around];
  context.save();
  intoWorld(context, layout, start);
  context.fillStyle = context.strokeStyle;
  context.globalAlpha = PATH_ALPHA;
  const { width } = layout.paths;
  for (const x of layout.paths.x) {
    for (const at of repeats(x, layout.period, fromX, toX)) context.fillRect(at - width / 2, fromZ, width, toZ - fromZ);
  }
  for (const z of layout.paths.z) {
    for (const at of repeats(z, layout.period, fromZ, toZ)) context.fillRect(fromX, at - width / 2, toX - fromX, width);
  }
  /** @type {[Thing[], number][]} */
  const layers = [[layout.areas, AREA_ALPHA], [layout.objects, 1]];
  for (const [things, alpha] of layers) {
    context.globalAlpha = alpha;
    for (const { x, z, radius, colour } of things) {
      context.fillStyle = colour;
      for (const atX of repeats(x, layout.period, fromX - radius, toX + radius)) {
        for (const atZ of repeats(z, layout.period, fromZ - radius, toZ + radius)) {
          context.beginPath();
          context.arc(atX, atZ, radius, 0, 2 * Math.PI);
          context.fill();
        }
      }
    }
  }
  context.restore();
}

/**
 * Every place at which something repeats within a range.
 * @param {number} at
 * @param {number} period
 * @param {number} from
 * @param {number} to
 */
export function repeats(at, period, from, to) {
  const places = [];
  for (let place = at + Math.ceil((from - at) / period) * period; place <= to; place += period) places.push(place);
  return places;
}
