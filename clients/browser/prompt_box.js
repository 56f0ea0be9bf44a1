'use strict';
/** The prompt box and the suggestions above it. */

import { byId, make } from './dom.js';

export class PromptBox {
  /** @param {(prompt: string) => void} onChoice  The visitor wants another prompt. */
  constructor(onChoice) {
    this._onChoice = onChoice;
    this._input = /** @type {HTMLInputElement} */ (byId('prompt'));
    byId('prompt-form').addEventListener('submit', (/** @type {Event} */ event) => {
      event.preventDefault();
      const prompt = this._input.value.trim();
      // Nothing is no prompt: the box goes back to the one in force.
      if (prompt === '') this._input.value = this._inForce;
      onChoice(prompt);
    });
    this._input.addEventListener('keydown', (event) => {
      if (event.key !== 'Escape') return;
      this._input.value = this._inForce;
      onChoice(this._inForce);
    });
    this._inForce = '';
  }

  focus() {
    this._input.focus();
    this._input.select();
  }

  /**
   * @param {string} prompt      In force, or on its way.
   * @param {boolean} isPending  No chunk shows it yet.
   */
  show(prompt, isPending) {
    if (this._inForce !== prompt) {
      this._inForce = prompt;
      this._input.value = prompt;
    }
    this._input.closest('.field')?.classList.toggle('pending', isPending);
    for (const chip of byId('prompts').children) chip.ariaPressed = String(chip.textContent === prompt);
  }

  /**
   * @param {string[]} prompts   Suggestions.
   * @param {number} maxChars
   */
  offer(prompts, maxChars) {
    this._input.maxLength = maxChars;
    const chips = prompts.map((prompt) => {
      const chip = make('button', { type: 'button', ariaPressed: String(prompt === this._inForce) }, prompt);
      chip.addEventListener('click', () => this._onChoice(prompt));
      return chip;
    });
    byId('prompts').replaceChildren(...chips);
  }
}
