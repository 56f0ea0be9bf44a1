'use strict';
/** Small helpers for the page's elements. */

/**
 * The element with an id; its absence is our bug.
 * @param {string} id
 * @returns {any}
 */
export function byId(id) {
  const element = document.getElementById(id);
  if (element === null) throw new Error(`index.html has no element #${id}`);
  return element;
}

/**
 * @param {string} tag
 * @param {Record<string, any>} properties
 * @param {...(Node | string)} children
 * @returns {any}
 */
export function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}
