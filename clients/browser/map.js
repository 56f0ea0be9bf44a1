'use strict';
/**
 * A small map, seen from above: a grid, the way walked, where the camera stands and what it sees. Up is where the run began
 * to look, and so is north, unless the world's layout says where that is.
 */

import { byId } from './dom.js';
import { drawLayout, northRad } from './layout.js';

/** The map shows at least this far in each direction, in the model's units, where nothing is known of the world. */
const LEAST_REACH = 0.5;
/** Of a world that repeats, one whole period across at the least: somewhere on it is each landmark. */
const LEAST_PERIODS = 0.5;
/**
 * A world that repeats is shown for this many of its periods in each direction at the most: farther out it would be the same
 * again, small, and the cost of drawing it grows with the square. The trail then leaves the map.
 */
const MOST_PERIODS = 2;
/** Share of the map's half that the trail may fill before it is drawn smaller. */
const FILL = 0.8;
const VIEW_RAD = (76 * Math.PI) / 180;
const CONE_SHARE = 0.42;
/** Lines of the grid are this far apart at the least, in pixels. */
const LEAST_GRID_PX = 14;

/**
 * How far the map must reach to hold a trail around a place: the least, doubled or so until it is enough, as it then
 * changes seldom.
 * @param {{x: number, z: number}} place
 * @param {{x: number, z: number}[]} trail
 * @param {number} least
 */
export function reachOf(place, trail, least) {
  const far = trail.reduce((most, { x, z }) => Math.max(most, Math.abs(x - place.x), Math.abs(z - place.z)), 0) / FILL;
  let reach = least;
  for (let step = 0; reach < far; step += 1) reach *= step % 3 === 1 ? 2.5 : 2;
  return reach;
}

export class MapCard {
  constructor() {
    this._canvas = /** @type {HTMLCanvasElement} */ (byId('map'));
    this._walk = /** @type {import('./walk.js').Walk | null} */ (null);
    this._reach = LEAST_REACH;
    /** What lies where, if that is known. */
    this.layout = /** @type {import('./layout.js').Layout | null} */ (null);
    byId('map-card').addEventListener('toggle', () => this._draw());
  }

  /** @param {import('./walk.js').Walk} walk */
  show(walk) {
    this._walk = walk;
    byId('map-card').classList.toggle('has-place', walk.isKnown);
    if (byId('map-card').open) this._draw();
  }

  _draw() {
    const walk = this._walk;
    const size = this._canvas.clientWidth;
    const context = this._canvas.getContext('2d');
    if (walk === null || !walk.isKnown || size === 0 || context === null) return;
    const pixels = Math.round(size * window.devicePixelRatio);
    if (this._canvas.width !== pixels) Object.assign(this._canvas, { width: pixels, height: pixels });
    const { place, trail } = walk;
    // Zooms out at once and in slowly, so that standing still does not make the map breathe.
    const period = this.layout === null ? null : this.layout.period / this.layout.metres_per_unit;
    const least = period === null ? LEAST_REACH : LEAST_PERIODS * period;
    const most = period === null ? Infinity : MOST_PERIODS * period;
    this._reach += (Math.min(reachOf(place, trail, least), most) - this._reach) * 0.12;
    const scale = size / 2 / this._reach;
    context.setTransform(window.devicePixelRatio, 0, 0, window.devicePixelRatio, 0, 0);
    context.clearRect(0, 0, size, size);
    context.translate(size / 2, size / 2);
    // Computed colours: a canvas does not know the variables of a style sheet.
    const { color, outlineColor, borderTopColor } = getComputedStyle(this._canvas);
    drawGrid(context, size, scale, place, borderTopColor);
    if (this.layout !== null && walk.startImage !== null) {
      context.save();
      context.scale(scale, scale);
      context.translate(-place.x, place.z);
      drawLayout(context, this.layout, walk.startImage, place, this._reach);
      context.restore();
    }
    drawTrail(context, scale, place, trail, color);
    const north = northRad(this.layout, walk.startImage);
    drawNorth(context, size, north, color);
    drawCamera(context, size, place.headingRad, color, outlineColor);
    const { x, z, headingRad } = place;
    const degrees = Math.round(((headingRad - north) * 180) / Math.PI + 720) % 360;
    byId('map-place').value = `${x.toFixed(2)}, ${z.toFixed(2)} · ${degrees}°`;
  }
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {number} size
 * @param {number} north   Radians clockwise from up.
 * @param {string} colour
 */
function drawNorth(context, size, north, colour) {
  const [across, up] = [Math.sin(north), Math.cos(north)];
  // On the rim of a square.
  const away = (size / 2 - 10) / Math.max(Math.abs(across), Math.abs(up));
  context.fillStyle = colour;
  context.font = '600 10px system-ui, sans-serif';
  context.textAlign = 'center';
  context.textBaseline = 'middle';
  context.fillText('N', across * away, -up * away);
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {number} size
 * @param {number} scale
 * @param {import('./walk.js').Place} place
 * @param {string} colour
 */
function drawGrid(context, size, scale, place, colour) {
  let step = 0.1;
  for (let at = 0; step * scale < LEAST_GRID_PX; at += 1) step *= at % 3 === 1 ? 2.5 : 2;
  const half = size / 2;
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  for (let at = Math.ceil((place.x - half / scale) / step) * step; (at - place.x) * scale < half; at += step) {
    const x = Math.round((at - place.x) * scale) + 0.5;
    context.moveTo(x, -half);
    context.lineTo(x, half);
  }
  for (let at = Math.ceil((place.z - half / scale) / step) * step; (at - place.z) * scale < half; at += step) {
    const y = Math.round(-(at - place.z) * scale) + 0.5;
    context.moveTo(-half, y);
    context.lineTo(half, y);
  }
  context.stroke();
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {number} scale
 * @param {import('./walk.js').Place} place
 * @param {{x: number, z: number}[]} trail
 * @param {string} colour
 */
function drawTrail(context, scale, place, trail, colour) {
  const points = [...trail, place].map(({ x, z }) => [(x - place.x) * scale, -(z - place.z) * scale]);
  context.strokeStyle = colour;
  context.lineWidth = 2;
  context.lineJoin = 'round';
  context.globalAlpha = 0.75;
  context.beginPath();
  for (const [x, y] of points) context.lineTo(x, y);
  context.stroke();
  context.beginPath();
  // Where the run began.
  context.arc(-place.x * scale, place.z * scale, 3, 0, 2 * Math.PI);
  context.stroke();
  context.globalAlpha = 1;
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {number} size
 * @param {number} headingRad
 * @param {string} colour
 * @param {string} rim
 */
function drawCamera(context, size, headingRad, colour, rim) {
  const reach = (size / 2) * CONE_SHARE;
  // A canvas measures angles from x clockwise; up is a quarter turn back.
  const middle = headingRad - Math.PI / 2;
  const light = context.createRadialGradient(0, 0, 0, 0, 0, reach);
  light.addColorStop(0, colour);
  // Not `transparent`: that is black, and would show.
  light.addColorStop(1, colour.replace('rgb(', 'rgba(').replace(')', ', 0)'));
  context.globalAlpha = 0.55;
  context.fillStyle = light;
  context.beginPath();
  context.moveTo(0, 0);
  context.arc(0, 0, reach, middle - VIEW_RAD / 2, middle + VIEW_RAD / 2);
  context.fill();
  context.globalAlpha = 1;
  context.fillStyle = colour;
  context.strokeStyle = rim;
  context.lineWidth = 2;
  context.beginPath();
  context.arc(0, 0, 5, 0, 2 * Math.PI);
  context.fill();
  context.stroke();
}
